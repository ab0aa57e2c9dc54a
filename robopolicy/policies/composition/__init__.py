"""What a composition of policies consists of: operators, the alignment of the parents, the sampler, guidance."""
