"""Claims of off-policy learners beyond return, measured on Pendulum."""
