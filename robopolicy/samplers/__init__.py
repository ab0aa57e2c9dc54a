"""Where experience comes from: rollouts in a simulator."""
