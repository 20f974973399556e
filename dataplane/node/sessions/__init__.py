"""What serves the requests of one client, whichever node has its streams and tables: the interface of both kinds of
streams, checks of requests, and columns that a client has put to hand them over."""
