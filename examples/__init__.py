"""Single-file programs that read from top to bottom; start with `flow_bc.py`, then `reinflow.py`."""
