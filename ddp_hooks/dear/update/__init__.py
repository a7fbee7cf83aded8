"""Update: ways in which the user's optimizer steps, and code that looks at gradients before it does."""
