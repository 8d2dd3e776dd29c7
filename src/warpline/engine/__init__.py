"""How tokens come out: state, executors, and the loop that drives them."""
