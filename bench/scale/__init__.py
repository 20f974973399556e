"""What more hosts than there are would do: a model of events, with this library's own placement and samplers, whose
costs are measured on real nodes (`calibrate`), and which is held against real runs of 1 to 8 nodes (`validate`)."""
