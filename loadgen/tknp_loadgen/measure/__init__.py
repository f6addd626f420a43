"""What records mean: metrics, attainment, validity."""
