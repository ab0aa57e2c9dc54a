"""What each learner with a replay memory claims beyond return, measured on Pendulum."""
