"""Where experience comes from: rollouts, curricula, interventions."""
