"""What people look at: figures, one HTML page, a PNG, a CSV."""
