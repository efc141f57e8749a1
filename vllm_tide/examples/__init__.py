"""Commented example configurations, shipped as package data."""
