"""Who runs when. Pure deciders and tables: no trio, no HTTP, no llama.cpp, no clock of their own."""
