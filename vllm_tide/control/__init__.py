"""Control of the speculative length in NumPy, without torch, vLLM or a wall clock.

The engine's adapter and the simulator run the same code. Times are float64 seconds;
the current time is always an argument.
"""
