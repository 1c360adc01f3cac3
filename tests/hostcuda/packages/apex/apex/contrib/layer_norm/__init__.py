"""apex's persistent layer norm."""
