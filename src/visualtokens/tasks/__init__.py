"""What a model is for: losses, and the measures of how well it does."""
