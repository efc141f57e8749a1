"""Speculative-length control: pure NumPy, no torch, no vLLM, no wall clock.

The engine's adapter and the simulator drive the same code; times are float64 seconds
and *now* is always an argument.
"""
