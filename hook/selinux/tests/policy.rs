//! The policy as it is asked, on a selinuxfs of plain files: its `access` is a terminal, at whose other end a thread
//! answers what is written.
#![allow(clippy::unwrap_used, reason = "tests")]

mod fake;

use aliquot_selinux::{Class, Label, Policy, PolicyError};
use fake::Selinuxfs;

fn label(text: &str) -> Label {
    text.parse().unwrap()
}

const PROCESS: &str = "system_u:system_r:container_t:s0:c1,c2";

/// What may not be done with a file of this type, where the policy lets containers read `good_t`.
fn denied(selinuxfs: &Selinuxfs, class: Class, object: &str) -> Result<Vec<&'static str>, PolicyError> {
    let object = label(&format!("system_u:object_r:{object}:s0"));
    Policy::new(selinuxfs.path()).denied(&label(PROCESS), &object, class, &["read", "open", "map", "execute"])
}

#[test]
fn what_the_policy_denies_is_named() {
    let selinuxfs = Selinuxfs::new(|question| match question {
        // Class 7: read is the first, open the second permission, execute the fourth.
        "system_u:system_r:container_t:s0:c1,c2 system_u:object_r:good_t:s0 7" => "f ffffffff 0 ffffffff 1 0",
        "system_u:system_r:container_t:s0:c1,c2 system_u:object_r:half_t:s0 7" => "3 ffffffff 0 ffffffff 1 0",
        "system_u:system_r:container_t:s0:c1,c2 system_u:object_r:bad_t:s0 7" => "0 ffffffff 0 ffffffff 1 0",
        "system_u:system_r:container_t:s0:c1,c2 system_u:object_r:noted_t:s0 7" => {
            "0 ffffffff 0 ffffffff 1 1"
        }
        _ => "no such question",
    });
    selinuxfs.class("file", 7, &["read", "open", "map", "execute"]);
    let of = |object| denied(&selinuxfs, Class::File, object).unwrap();
    assert_eq!(of("good_t"), [] as [&str; 0]);
    assert_eq!(of("half_t"), ["map", "execute"]);
    assert_eq!(of("bad_t"), ["read", "open", "map", "execute"]);
    assert_eq!(of("noted_t"), [] as [&str; 0], "a permissive domain is denied nothing");
    let strange = denied(&selinuxfs, Class::File, "strange_t").unwrap_err();
    assert!(strange.to_string().contains("access says \"no such question\""), "{strange}");
    let other = denied(&selinuxfs, Class::Directory, "good_t").unwrap_err();
    assert!(other.to_string().contains("class/dir/index cannot be read"), "{other}");
}

#[test]
fn a_permissive_system_denies_nothing() {
    let selinuxfs = Selinuxfs::new(|_| "0 ffffffff 0 ffffffff 1 0");
    selinuxfs.class("file", 7, &["read", "open", "map", "execute"]);
    assert_eq!(denied(&selinuxfs, Class::File, "bad_t").unwrap().len(), 4);
    selinuxfs.write("enforce", "0");
    assert_eq!(denied(&selinuxfs, Class::File, "bad_t").unwrap(), [] as [&str; 0]);
    selinuxfs.write("enforce", "perhaps");
    assert!(matches!(denied(&selinuxfs, Class::File, "bad_t"), Err(PolicyError::Malformed { .. })));
}

#[test]
fn only_a_young_permission_may_be_unknown_to_a_policy() {
    let selinuxfs = Selinuxfs::new(|_| "7 ffffffff 0 ffffffff 1 0");
    selinuxfs.class("file", 7, &["read", "open", "execute"]);
    assert_eq!(denied(&selinuxfs, Class::File, "any_t").unwrap(), [] as [&str; 0]);
    std::fs::remove_file(selinuxfs.path().join("class/file/perms/read")).unwrap();
    assert!(matches!(denied(&selinuxfs, Class::File, "any_t"), Err(PolicyError::Io { .. })));
}

#[test]
fn a_label_that_the_policy_does_not_know_is_told_from_other_failures() {
    let selinuxfs = Selinuxfs::new(|_| "");
    selinuxfs.class("file", 7, &["read"]);
    let access = selinuxfs.path().join("access");
    // Files that refuse what is written as selinuxfs refuses such a label, and otherwise.
    for (kernels, is_unknown) in [("/proc/self/oom_score_adj", true), ("/dev/full", false)] {
        std::fs::remove_file(&access).unwrap();
        std::os::unix::fs::symlink(kernels, &access).unwrap();
        let error = denied(&selinuxfs, Class::File, "strange_t").unwrap_err();
        assert_eq!(matches!(error, PolicyError::Unknown { .. }), is_unknown, "{error}");
        assert_eq!(error.to_string().contains("system_u:object_r:strange_t:s0"), is_unknown, "{error}");
    }
}

#[test]
fn a_directory_that_is_no_selinuxfs_answers_nothing() {
    let (selinuxfs, empty) = (Selinuxfs::new(|_| ""), tempfile::tempdir().unwrap());
    let dirs = || [empty.path().to_owned(), selinuxfs.path().to_owned()];
    assert!(Policy::find(dirs()).is_some());
    assert!(Policy::find(dirs().into_iter().take(1)).is_none());
    let nothing = Policy::new(empty.path()).denied(&label(PROCESS), &label("u:r:t"), Class::File, &["read"]);
    assert!(matches!(nothing, Err(PolicyError::Io { .. })));
}
