"""Parts of a composition of policies: operators, alignment of the parents, sampler, guidance."""
