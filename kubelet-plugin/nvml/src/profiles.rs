//! What boards can be cut into, asked once: that is dozens of calls, and the answer is the board's for as long as the
//! library is open.

use aliquot_model::{GpuUuid, MigProfile};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// The profiles of the GPUs that were asked, by GPU and MIG mode.
#[derive(Debug, Default)]
pub(crate) struct Profiles(Mutex<BTreeMap<(GpuUuid, bool), Vec<MigProfile>>>);

impl Profiles {
    /// The profiles of a GPU in a mode. What cannot be read is asked for again the next time, and so is a board that
    /// says that it has none.
    pub(crate) fn of<E>(
        &self,
        gpu: &GpuUuid,
        enabled: bool,
        read: impl FnOnce() -> Result<Vec<MigProfile>, E>,
    ) -> Result<Vec<MigProfile>, E> {
        let key = (gpu.clone(), enabled);
        if let Some(known) = self.0.lock().get(&key) {
            return Ok(known.clone());
        }
        // Not under the lock: a GPU may not answer, and holds up no other then.
        let profiles = read()?;
        if !profiles.is_empty() {
            self.0.lock().insert(key, profiles.clone());
        }
        Ok(profiles)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::h100_80;

    #[test]
    fn a_board_is_asked_once_a_mode_and_again_after_no_answer() {
        let info = h100_80(0);
        let (profiles, gpu) = (Profiles::default(), &info.uuid);
        assert_eq!(profiles.of(gpu, false, || Err("lost")), Err("lost"));
        assert_eq!(profiles.of(gpu, false, || Ok::<_, &str>(Vec::new())), Ok(Vec::new()));
        let known = info.profiles().to_vec();
        for _ in 0..2 {
            assert_eq!(profiles.of(gpu, false, || Ok::<_, &str>(known.clone())), Ok(known.clone()));
        }
        assert_eq!(profiles.of(gpu, false, || Err("asked twice")), Ok(known));
        assert_eq!(profiles.of(gpu, true, || Err("another mode")), Err("another mode"));
        assert_eq!(profiles.of(&h100_80(1).uuid, false, || Err("another GPU")), Err("another GPU"));
    }
}
