"""Healthy and faulty runs on which the monitor's alarms are measured, once."""
