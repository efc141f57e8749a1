"""Drafts by prompt lookup: an n-gram index per request, and acceptance by source."""
