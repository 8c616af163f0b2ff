"""Fleet benchmark: recorded sessions of coding agents, played on any server."""
