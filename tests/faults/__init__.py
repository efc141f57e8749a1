"""Fault injection: a real server and trainer under load, and their recovery.

`scene.py` holds server, trainer and run directory; `load.py` sends requests with known
outputs (`reference.py`) and checks every answer; `processes.py`, `memory.py`,
`bad_drafts.py` and `requests.py` hold the faults, one function each; `suite.py`
injects them one after another and checks the whole; `report.py` writes the report.
"""
