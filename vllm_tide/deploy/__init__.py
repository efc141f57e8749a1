"""Decisions on served traffic: when to train, the draft that is served, going back."""
