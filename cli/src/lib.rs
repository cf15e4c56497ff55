//! The aliquot command: demo, plan, top, explain, uninstall.
