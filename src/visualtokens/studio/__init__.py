"""The studio: see, explain, reduce and compare models in the browser (``vtok studio``)."""
