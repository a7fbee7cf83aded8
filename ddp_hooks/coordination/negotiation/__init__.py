"""Agreement of ranks on requests: algorithms and tables that know no sockets and no threads."""
