"""GLM-4V, GLM-4.1V, GLM-4.5V and GLM-4.6V: language models that read images and videos."""
