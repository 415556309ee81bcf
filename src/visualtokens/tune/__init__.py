"""Choosing a schedule: from a budget (planning), by training (search), and comparing them (tradeoff)."""
