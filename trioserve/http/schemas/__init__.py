"""What request bodies may hold, each field declared once: type, range, meaning."""
