"""Documents of reports, plans and inspections: their contents, and how they are rendered as HTML or printed."""
