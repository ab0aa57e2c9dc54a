PYTHON ?= python3
VENV ?= .venv
