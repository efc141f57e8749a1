"""Decisions on served traffic: when to train, which draft to serve, rollback."""
