//! The node agent's reading of regions that tenants write: whatever stands there, its grants are legal.
#![no_main]

use aliquot_arbiter::files::{GRANT, Keeper, make_grant};
use aliquot_fuzz::{Input, seeds, sound_region};
use aliquot_quota::grant::Grant;
use aliquot_quota::region::SlotState;
use aliquot_quota::{ComputePolicy, GpuUuid, QuotaFile};
use libfuzzer_sys::fuzz_target;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// Two shares of one GPU, one of which may borrow.
struct Node {
    folder: TempDir,
    regions: [File; 2],
}

fn node() -> &'static Node {
    static NODE: OnceLock<Node> = OnceLock::new();
    NODE.get_or_init(|| {
        let folder = tempfile::tempdir_in(if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" });
        let folder = folder.expect("a folder");
        let regions = ["a", "b"].map(|share| {
            let of = folder.path().join(share);
            for part in ["quota", "region"] {
                std::fs::create_dir_all(of.join(part)).expect("a folder");
            }
            let uuid = GpuUuid::new("GPU-4e3f2d1c-0b0a-5968-8776-655443322110").expect("a UUID");
            let compute_policy = if share == "a" { ComputePolicy::Soft } else { ComputePolicy::Hard };
            let quota = QuotaFile { cores_percent: 40, compute_policy, ..QuotaFile::new(uuid) };
            std::fs::write(of.join("quota/quota"), quota.encode()).expect("a quota");
            make_grant(&of.join("quota")).expect("a grant");
            std::fs::write(of.join("region/region"), sound_region()).expect("a region");
            File::options().read(true).write(true).open(of.join("region/region")).expect("a region")
        });
        Node { folder, regions }
    })
}

/// Offset of the compute side.
const COMPUTE: u64 = (aliquot_quota::REGION_FILE_SIZE - 131_072) as u64;

fuzz_target!(
    init: seeds(|| (0..8_u8).map(|kind| (0..60).map(|at| kind.wrapping_mul(37).wrapping_add(at)).collect()).collect()),
    |bytes: &[u8]| {
        let node = node();
        let live = SlotState::Live.word(1).to_le_bytes();
        for region in &node.regions {
            // What matters of it is as new again.
            region.write_all_at(&[0; 4096], 64 - 64 + 64).expect("written");
            region.write_all_at(&vec![0; 64 + 64 * 32], COMPUTE).expect("written");
            region.write_all_at(&live, 4096 + 40).expect("written");
            region.write_all_at(&live, 4096 + 256 + 40).expect("written");
        }
        let mut input = Input(bytes);
        let mut keeper = Keeper::new(node.folder.path(), Duration::from_millis(2));
        let mut now = 1_u64 << 40;
        for _ in 0..24 {
            if input.is_over() {
                break;
            }
            for _ in 0..1 + input.byte() % 8 {
                let (which, place, value) = (usize::from(input.byte() % 2), input.place() as u64, input.word());
                // Times near now are what log entries are looked at for.
                let value = if input.byte() % 2 == 0 { value } else { now.wrapping_add(value % 100_000_000) };
                let place = if input.byte() % 2 == 0 { place } else { COMPUTE + place % (64 + 64 * 32) };
                node.regions[which].write_all_at(&value.to_le_bytes(), place & !7).expect("written");
            }
            let pause = keeper.tick(now);
            assert!(pause <= Duration::from_secs(1));
            now += 20_000_000;
            for share in ["a", "b"] {
                let grant = std::fs::read(node.folder.path().join(share).join("quota").join(GRANT)).expect("a grant");
                if let Some(grant) = Grant::decode(&grant) {
                    assert!(grant.borrow_percent <= 100 && grant.own_permille <= 1000);
                    assert!(share == "a" || grant.borrow_percent == 0, "a hard share borrows nothing");
                    assert!(grant.valid_until_ns <= now + 1_000_000_000, "a grant runs out by itself");
                }
            }
        }
    }
);
