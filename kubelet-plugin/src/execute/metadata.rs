//! Writes and removes the device metadata files of a claim.

use super::{Machine, StepError};
use crate::ledger::{Device, Record};
use crate::metadata;
use aliquot_nvml::GpuError;
use std::collections::BTreeMap;

impl Machine {
    /// Writes the device metadata of a claim whose containers get it, from the hardware as it is now.
    pub(super) fn write_metadata(&self, record: &Record) -> Result<(), StepError> {
        let Some(wanted) = &record.metadata else { return Ok(()) };
        let told = |device: &Device| {
            // For a GPU that is left out of admin access there is no data now.
            let info = self.info_unless_gone(device)?;
            let attributes = info.map_or_else(BTreeMap::new, |info| metadata::attributes(device, &info));
            Ok((device.clone(), attributes))
        };
        let devices = record.devices.iter().map(told).collect::<Result<Vec<_>, GpuError>>()?;
        let driver = &self.site.driver;
        for file in metadata::requests(driver, &self.data_dir, &record.claim, wanted, &devices)? {
            metadata::files::write(&self.data_dir, &file, |path| {
                Ok::<_, StepError>(self.labels.read_only(path)?)
            })?;
            self.probe.at("after a metadata file");
            self.cdi.write(&file.spec_name, &file.spec)?;
            self.probe.at("after a metadata spec");
        }
        Ok(())
    }

    /// Removes the device metadata of a claim, if it has any. As with shares, files that stay do not keep the
    /// claim from being released. Returns true if there was any.
    pub fn remove_metadata(&self, uid: &str) -> bool {
        match metadata::files::remove(&self.cdi, &self.site.driver, &self.data_dir, uid) {
            Ok(true) => {
                self.probe.at("after removing metadata");
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::warn!(claim.uid = uid, %error, "a claim's device metadata stays until the agent's next start");
                false
            }
        }
    }
}
