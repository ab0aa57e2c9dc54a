"""Simulators around a simulator, which add observations or change rewards; chosen by name in `task.wrappers`."""
