//! The boards, with their MIG tables.
//!
//! Memory, multiprocessors, placements and profile ids of the MIG profiles come from NVIDIA's MIG user
//! guide and from captures of real nodes. Figures without such a record (clocks, reserved memory, PCI
//! subsystem ids, engines per profile on Blackwell, the second A30 `+me` profile) are assumed; the
//! README lists them.

use crate::board::{Architecture, Board, Engines, GiProfile};

const fn engines(copy: u32, decoder: u32, encoder: u32, jpeg: u32, ofa: u32) -> Engines {
    Engines { copy, decoder, encoder, jpeg, ofa }
}

/// The seven-slice boards differ in these figures only; a profile is (memory MiB, multiprocessors, engines).
struct SevenSlices {
    names: [&'static str; 7],
    one: (u64, u32, Engines),
    one_media: Engines,
    one_double: (u64, u32, Engines),
    two: (u64, u32, Engines),
    three: (u64, u32, Engines),
    four: (u64, u32, Engines),
    seven: (u64, u32, Engines),
}

const fn seven_slices(t: SevenSlices) -> [GiProfile; 7] {
    let [one, media, double, two, three, four, seven] = t.names;
    let sm = t.one.1;
    [
        profile(one, 19, 0, (1, sm), t.one, &[0, 1, 2, 3, 4, 5, 6], 1, 7),
        profile(media, 20, 7, (1, sm), (t.one.0, t.one.1, t.one_media), &[0, 1, 2, 3, 4, 5, 6], 1, 1),
        profile(double, 15, 9, (1, t.one_double.1), t.one_double, &[0, 2, 4, 6], 2, 4),
        profile(two, 14, 1, (2, sm), t.two, &[0, 2, 4], 2, 3),
        profile(three, 9, 2, (3, sm), t.three, &[0, 4], 4, 2),
        profile(four, 5, 3, (4, sm), t.four, &[0], 4, 1),
        profile(seven, 0, 4, (7, sm), t.seven, &[0], 8, 1),
    ]
}

/// `shape` is (compute slices, multiprocessors of one of them), `body` (memory MiB, multiprocessors, engines).
#[expect(clippy::too_many_arguments, reason = "one row of a table")]
const fn profile(
    name: &'static str,
    id: u32,
    nvml: u32,
    shape: (u32, u32),
    body: (u64, u32, Engines),
    starts: &'static [u32],
    size: u32,
    max: u32,
) -> GiProfile {
    GiProfile {
        name,
        id,
        nvml,
        slices: shape.0,
        multiprocessors: body.1,
        memory_mib: body.0,
        starts,
        size,
        max,
        engines: body.2,
        graphics: false,
        p2p: false,
        slice_multiprocessors: shape.1,
    }
}

const fn with_graphics(mut profile: GiProfile) -> GiProfile {
    profile.graphics = true;
    profile
}

const A100_ENGINES: [Engines; 6] = [
    engines(1, 0, 0, 0, 0),
    engines(1, 1, 0, 1, 1),
    engines(2, 1, 0, 0, 0),
    engines(3, 2, 0, 0, 0),
    engines(4, 2, 0, 0, 0),
    engines(7, 5, 0, 1, 1),
];

const A100_40_PROFILES: [GiProfile; 7] = {
    let [e1, me, e2, e3, e4, e7] = A100_ENGINES;
    seven_slices(SevenSlices {
        names: ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
        one: (4864, 14, e1),
        one_media: me,
        one_double: (9856, 14, engines(1, 1, 0, 0, 0)),
        two: (9856, 28, e2),
        three: (19968, 42, e3),
        four: (19968, 56, e4),
        seven: (40192, 98, e7),
    })
};

const A100_80_PROFILES: [GiProfile; 7] = {
    let [e1, me, e2, e3, e4, e7] = A100_ENGINES;
    seven_slices(SevenSlices {
        names: ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
        one: (9728, 14, e1),
        one_media: me,
        one_double: (19968, 14, engines(1, 1, 0, 0, 0)),
        two: (19968, 28, e2),
        three: (40192, 42, e3),
        four: (40192, 56, e4),
        seven: (80384, 98, e7),
    })
};

const HOPPER_ENGINES: [Engines; 6] = [
    engines(1, 1, 0, 1, 0),
    engines(1, 1, 0, 1, 1),
    engines(2, 2, 0, 2, 0),
    engines(3, 3, 0, 3, 0),
    engines(4, 4, 0, 4, 0),
    engines(8, 7, 0, 7, 1),
];

const H100_80_PROFILES: [GiProfile; 7] = {
    let [e1, me, e2, e3, e4, e7] = HOPPER_ENGINES;
    seven_slices(SevenSlices {
        names: ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
        one: (9984, 16, e1),
        one_media: me,
        one_double: (20096, 26, e1),
        two: (20096, 32, e2),
        three: (40448, 60, e3),
        four: (40448, 64, e4),
        seven: (81152, 132, e7),
    })
};

const H200_141_PROFILES: [GiProfile; 7] = {
    let [e1, me, e2, e3, e4, e7] = HOPPER_ENGINES;
    seven_slices(SevenSlices {
        names: ["1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
        one: (16384, 16, e1),
        one_media: me,
        one_double: (33024, 26, e1),
        two: (33024, 32, e2),
        three: (71168, 60, e3),
        four: (71168, 64, e4),
        seven: (143104, 132, e7),
    })
};

const B200_180_PROFILES: [GiProfile; 7] = seven_slices(SevenSlices {
    names: ["1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"],
    one: (20992, 18, engines(2, 1, 0, 1, 0)),
    one_media: engines(2, 1, 0, 1, 1),
    one_double: (45312, 30, engines(2, 1, 0, 1, 0)),
    two: (45312, 36, engines(4, 2, 0, 2, 0)),
    three: (91136, 70, engines(6, 3, 0, 3, 0)),
    four: (91136, 72, engines(8, 4, 0, 4, 0)),
    seven: (182784, 148, engines(16, 7, 0, 7, 1)),
});

const A30_PROFILES: [GiProfile; 5] = [
    profile("1g.6gb", 14, 0, (1, 14), (5836, 14, engines(1, 0, 0, 0, 0)), &[0, 1, 2, 3], 1, 4),
    profile("1g.6gb+me", 21, 7, (1, 14), (5836, 14, engines(1, 1, 0, 1, 1)), &[0, 1, 2, 3], 1, 1),
    profile("2g.12gb", 5, 1, (2, 14), (11672, 28, engines(2, 2, 0, 0, 0)), &[0, 2], 2, 2),
    profile("2g.12gb+me", 6, 8, (2, 14), (11672, 28, engines(2, 2, 0, 1, 1)), &[0, 2], 2, 1),
    profile("4g.24gb", 0, 3, (4, 14), (24064, 56, engines(4, 4, 0, 1, 1)), &[0], 4, 1),
];

const RTX_PRO_ONE: &[u32] = &[0, 3, 6, 9];
const RTX_PRO_TWO: &[u32] = &[0, 6];
const RTX_PRO_PROFILES: [GiProfile; 11] = {
    let one = (24192, 46, engines(1, 1, 1, 1, 0));
    let two = (48512, 94, engines(2, 2, 2, 2, 0));
    let four = (97280, 188, engines(4, 4, 4, 4, 1));
    [
        profile("1g.24gb", 14, 0, (1, 46), one, RTX_PRO_ONE, 3, 4),
        profile("1g.24gb+me", 21, 7, (1, 46), (one.0, one.1, engines(1, 1, 1, 1, 1)), RTX_PRO_ONE, 3, 1),
        with_graphics(profile("1g.24gb+gfx", 47, 10, (1, 46), one, RTX_PRO_ONE, 3, 4)),
        profile("1g.24gb+me.all", 65, 15, (1, 46), (one.0, one.1, engines(1, 4, 4, 4, 1)), RTX_PRO_ONE, 3, 1),
        profile("1g.24gb-me", 67, 13, (1, 46), (one.0, one.1, engines(1, 0, 0, 0, 0)), RTX_PRO_ONE, 3, 4),
        profile("2g.48gb", 5, 1, (2, 47), two, RTX_PRO_TWO, 6, 2),
        with_graphics(profile("2g.48gb+gfx", 35, 11, (2, 47), two, RTX_PRO_TWO, 6, 2)),
        profile("2g.48gb+me.all", 64, 16, (2, 47), (two.0, two.1, engines(2, 4, 4, 4, 1)), RTX_PRO_TWO, 6, 1),
        profile("2g.48gb-me", 66, 14, (2, 47), (two.0, two.1, engines(2, 0, 0, 0, 0)), RTX_PRO_TWO, 6, 2),
        profile("4g.96gb", 0, 3, (4, 47), four, &[0], 12, 1),
        with_graphics(profile("4g.96gb+gfx", 32, 12, (4, 47), four, &[0], 12, 1)),
    ]
};

/// A board without MIG and with figures to overwrite.
const PLAIN: Board = Board {
    key: "",
    product: "",
    architecture: Architecture::Ampere,
    brand: 14,
    compute_capability: (8, 0),
    multiprocessors: 0,
    cores_per_multiprocessor: 128,
    memory_mib: 0,
    reserved_mib: 0,
    memory_bus_width: 0,
    sm_clock_mhz: 0,
    memory_clock_mhz: 0,
    power_limit_mw: 0,
    pci_device_id: 0,
    pci_subsystem_id: 0,
    pcie: (4, 16),
    nvlinks: 0,
    engines: engines(0, 0, 0, 0, 0),
    axis: 0,
    profiles: &[],
    mig_needs_reset: false,
    mig_survives_reboot: false,
};

const AMPERE: Board = Board {
    architecture: Architecture::Ampere,
    compute_capability: (8, 0),
    cores_per_multiprocessor: 64,
    mig_needs_reset: true,
    mig_survives_reboot: true,
    ..PLAIN
};

/// Every board that a node can have.
pub static BOARDS: &[Board] = &[
    Board {
        key: "A30",
        product: "NVIDIA A30",
        multiprocessors: 56,
        memory_mib: 24576,
        reserved_mib: 399,
        memory_bus_width: 3072,
        sm_clock_mhz: 1440,
        memory_clock_mhz: 1215,
        power_limit_mw: 165_000,
        pci_device_id: 0x20B7_10DE,
        pci_subsystem_id: 0x1532_10DE,
        engines: engines(4, 4, 0, 1, 1),
        axis: 4,
        profiles: &A30_PROFILES,
        ..AMPERE
    },
    Board {
        key: "A100-40",
        product: "NVIDIA A100-SXM4-40GB",
        multiprocessors: 108,
        memory_mib: 40960,
        reserved_mib: 425,
        memory_bus_width: 5120,
        sm_clock_mhz: 1410,
        memory_clock_mhz: 1215,
        power_limit_mw: 400_000,
        pci_device_id: 0x20B0_10DE,
        pci_subsystem_id: 0x134F_10DE,
        nvlinks: 12,
        engines: engines(7, 5, 0, 1, 1),
        axis: 8,
        profiles: &A100_40_PROFILES,
        ..AMPERE
    },
    Board {
        key: "A100-80",
        product: "NVIDIA A100-SXM4-80GB",
        multiprocessors: 108,
        memory_mib: 81920,
        reserved_mib: 595,
        memory_bus_width: 5120,
        sm_clock_mhz: 1410,
        memory_clock_mhz: 1593,
        power_limit_mw: 400_000,
        pci_device_id: 0x20B2_10DE,
        pci_subsystem_id: 0x147F_10DE,
        nvlinks: 12,
        engines: engines(7, 5, 0, 1, 1),
        axis: 8,
        profiles: &A100_80_PROFILES,
        ..AMPERE
    },
    Board {
        key: "H100-80",
        product: "NVIDIA H100 80GB HBM3",
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        multiprocessors: 132,
        memory_mib: 81559,
        reserved_mib: 551,
        memory_bus_width: 5120,
        sm_clock_mhz: 1980,
        memory_clock_mhz: 2619,
        power_limit_mw: 700_000,
        pci_device_id: 0x2330_10DE,
        pci_subsystem_id: 0x16C1_10DE,
        pcie: (5, 16),
        nvlinks: 18,
        engines: engines(8, 7, 0, 7, 1),
        axis: 8,
        profiles: &H100_80_PROFILES,
        ..PLAIN
    },
    Board {
        key: "H200-141",
        product: "NVIDIA H200",
        architecture: Architecture::Hopper,
        compute_capability: (9, 0),
        multiprocessors: 132,
        memory_mib: 143_771,
        reserved_mib: 606,
        memory_bus_width: 6144,
        sm_clock_mhz: 1980,
        memory_clock_mhz: 3201,
        power_limit_mw: 700_000,
        pci_device_id: 0x2335_10DE,
        pci_subsystem_id: 0x18BE_10DE,
        pcie: (5, 16),
        nvlinks: 18,
        engines: engines(8, 7, 0, 7, 1),
        axis: 8,
        profiles: &H200_141_PROFILES,
        ..PLAIN
    },
    Board {
        key: "B200-180",
        product: "NVIDIA B200",
        architecture: Architecture::Blackwell,
        compute_capability: (10, 0),
        multiprocessors: 148,
        memory_mib: 183_359,
        reserved_mib: 568,
        memory_bus_width: 8192,
        sm_clock_mhz: 1965,
        memory_clock_mhz: 3996,
        power_limit_mw: 1_000_000,
        pci_device_id: 0x2901_10DE,
        pci_subsystem_id: 0x1999_10DE,
        pcie: (5, 16),
        nvlinks: 18,
        engines: engines(16, 7, 0, 7, 1),
        axis: 8,
        profiles: &B200_180_PROFILES,
        ..PLAIN
    },
    Board {
        key: "RTX-PRO-6000",
        product: "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        architecture: Architecture::Blackwell,
        brand: 13,
        compute_capability: (12, 0),
        multiprocessors: 188,
        memory_mib: 97887,
        reserved_mib: 600,
        memory_bus_width: 512,
        sm_clock_mhz: 2430,
        memory_clock_mhz: 12481,
        power_limit_mw: 600_000,
        pci_device_id: 0x2BB5_10DE,
        pci_subsystem_id: 0x204E_10DE,
        pcie: (5, 16),
        engines: engines(4, 4, 4, 4, 1),
        axis: 12,
        profiles: &RTX_PRO_PROFILES,
        ..PLAIN
    },
    Board {
        key: "T4",
        product: "Tesla T4",
        architecture: Architecture::Turing,
        brand: 2,
        compute_capability: (7, 5),
        multiprocessors: 40,
        cores_per_multiprocessor: 64,
        memory_mib: 15360,
        reserved_mib: 450,
        memory_bus_width: 256,
        sm_clock_mhz: 1590,
        memory_clock_mhz: 5001,
        power_limit_mw: 70_000,
        pci_device_id: 0x1EB8_10DE,
        pci_subsystem_id: 0x12A2_10DE,
        pcie: (3, 16),
        engines: engines(3, 2, 1, 0, 0),
        ..PLAIN
    },
    Board {
        key: "L40S",
        product: "NVIDIA L40S",
        architecture: Architecture::Ada,
        compute_capability: (8, 9),
        multiprocessors: 142,
        memory_mib: 46068,
        reserved_mib: 600,
        memory_bus_width: 384,
        sm_clock_mhz: 2520,
        memory_clock_mhz: 9001,
        power_limit_mw: 350_000,
        pci_device_id: 0x26B9_10DE,
        pci_subsystem_id: 0x1851_10DE,
        engines: engines(2, 3, 3, 4, 1),
        ..PLAIN
    },
];

/// The board with this key (case, blanks and `-` or `_` do not matter).
pub fn board(key: &str) -> Option<&'static Board> {
    let plain = |s: &str| -> String {
        s.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
    };
    let wanted = plain(key);
    BOARDS.iter().find(|b| plain(b.key) == wanted)
}
