"""`midair drill`: upgrades and kills under load, traced, checked and drawn (docs/traces.md)."""
