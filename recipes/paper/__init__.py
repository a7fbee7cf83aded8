"""Tables and figures of the papers, each by one command: ours beside the paper's, and what is simulated says so."""
