"""Parts of ``make_demo_model.py``: a small target and draft trained from CPython.

No machine of the project downloads weights, so the demo target is trained on
text that every CPython installation carries.  Each module owns one stage.
"""
