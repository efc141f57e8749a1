"""Faults on purpose: a real server and trainer under load, and what becomes of them.

`scene.py` holds server, trainer and run directory; `load.py` sends requests whose
outputs are known (`reference.py`) and judges every answer; `processes.py`, `memory.py`,
`heads.py` and `requests.py` hold the faults, one function each; `suite.py` injects them
one after another and judges the whole; `report.py` writes it down.
"""
