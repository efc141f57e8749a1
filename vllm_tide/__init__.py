"""Trains a vLLM EAGLE-3 draft on live traffic while it serves, and swaps it in."""
