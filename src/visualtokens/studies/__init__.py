"""Studies: trainings that put a claim of a paper to the test, with several seeds and a verdict."""
