"""The client side: the plane, and the objects that its calls return."""
