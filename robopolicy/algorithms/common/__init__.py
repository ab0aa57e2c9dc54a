"""What several algorithms share: the contract, rollouts as minibatches, and the helpers of each family."""
