"""Drafts from a request's own text: an index of its n-grams, and who was right."""
