"""Files of trained models: saving and loading, compression, calibration of one-pass prediction, and export."""
