"""How a graph is cut into clients, and what the parts are like."""
