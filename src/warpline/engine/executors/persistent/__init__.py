"""The persistent executor: many tokens in one cooperative launch, with the weights on a tape."""
