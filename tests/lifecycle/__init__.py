"""The real server as a process, the real model, real sockets: what only shows when everything is put together."""
