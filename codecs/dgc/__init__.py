"""Deep gradient compression: one step, its settings, its message, its optimizer."""
