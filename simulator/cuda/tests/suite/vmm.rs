//! Physical memory by handle, mappings, and both shared between processes.
#![allow(unsafe_code, reason = "the tests call a C library")]

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};

use crate::common::{Cuda, MIB, TestNode, at, of, on, role, serve};

/// `CUmemAllocationProp` for pinned memory on device 0, exportable as a file descriptor.
fn prop() -> [u32; 8] {
    [1, 1, 1, 0, 0, 0, 0, 0]
}

/// `CUmemAccessDesc` for device 0, read and write.
fn access() -> [u32; 3] {
    [1, 0, 3]
}

fn create(cuda: &Cuda, bytes: u64) -> u64 {
    cuda.make("cuMemCreate", &[bytes, of(&prop()), 0])
}

fn map(cuda: &Cuda, handle: u64, bytes: u64) -> u64 {
    let address = cuda.make("cuMemAddressReserve", &[bytes, 0, 0, 0]);
    cuda.ok("cuMemMap", &[address, bytes, 0, handle, 0]);
    cuda.ok("cuMemSetAccess", &[address, bytes, of(&access()), 1]);
    address
}

#[test]
fn memory_lives_while_a_handle_or_a_mapping_holds_it() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let used = || start - cuda.free_bytes();
        let handle = create(&cuda, 64 * MIB);
        assert_eq!(used(), 64 * MIB, "charged by cuMemCreate");
        let address = map(&cuda, handle, 64 * MIB);
        assert_eq!(used(), 64 * MIB);
        cuda.ok("cuMemRelease", &[handle]);
        assert_eq!(used(), 64 * MIB, "the mapping holds it");
        let again = cuda.make("cuMemRetainAllocationHandle", &[address + 5 * MIB]);
        assert_eq!(again, handle);
        cuda.ok("cuMemUnmap", &[address, 64 * MIB]);
        assert_eq!(used(), 64 * MIB, "the handle holds it");
        cuda.ok("cuMemRelease", &[again]);
        assert_eq!(used(), 0);
        assert_eq!(cuda.call("cuMemRelease", &[again]), 1);
        cuda.ok("cuMemAddressFree", &[address, 64 * MIB]);
    });
}

#[test]
fn sizes_places_and_ranges_are_checked() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let granularity = cuda.make("cuMemGetAllocationGranularity", &[of(&prop()), 0]);
        assert_eq!(granularity, 2 * MIB);
        let mut out = 0_u64;
        assert_eq!(cuda.call("cuMemCreate", &[at(&mut out), MIB, of(&prop()), 0]), 1);
        let mut elsewhere = prop();
        elsewhere[3] = 5;
        assert_eq!(cuda.call("cuMemCreate", &[at(&mut out), 2 * MIB, of(&elsewhere), 0]), 101);
        let handle = create(&cuda, 4 * MIB);
        let address = cuda.make("cuMemAddressReserve", &[8 * MIB, 0, 0, 0]);
        assert_eq!(cuda.call("cuMemMap", &[address, 8 * MIB, 0, handle, 0]), 1, "larger than the memory");
        cuda.ok("cuMemMap", &[address, 4 * MIB, 0, handle, 0]);
        assert_eq!(cuda.call("cuMemMap", &[address + 2 * MIB, 2 * MIB, 0, handle, 0]), 1, "taken");
        assert_eq!(cuda.call("cuMemMap", &[address + 6 * MIB, 4 * MIB, 0, handle, 0]), 1, "over the end");
        assert_eq!(cuda.call("cuMemUnmap", &[address, 2 * MIB]), 1, "half a mapping");
        assert_eq!(cuda.call("cuMemAddressFree", &[address, 8 * MIB]), 1, "still mapped");
        assert_eq!(cuda.call("cuMemFree_v2", &[address]), 1);
        cuda.ok("cuMemUnmap", &[address, 4 * MIB]);
        assert_eq!(cuda.call("cuMemAddressFree", &[address, 4 * MIB]), 1, "another size");
        cuda.ok("cuMemAddressFree", &[address, 8 * MIB]);
    });
}

#[test]
fn several_handles_can_fill_one_reservation() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let address = cuda.make("cuMemAddressReserve", &[1 << 40, 0, 0, 0]);
        for piece in 0..8 {
            let handle = create(&cuda, 2 * MIB);
            cuda.ok("cuMemMap", &[address + piece * 2 * MIB, 2 * MIB, 0, handle, 0]);
            cuda.ok("cuMemRelease", &[handle]);
        }
        assert_eq!(start - cuda.free_bytes(), 16 * MIB);
        cuda.ok("cuMemSetAccess", &[address, 16 * MIB, of(&access()), 1]);
        let mut flags = 0_u64;
        cuda.ok("cuMemGetAccess", &[at(&mut flags), of(&[1_u32, 0]), address + 9 * MIB]);
        assert_eq!(flags, 3);
        cuda.ok("cuMemUnmap", &[address, 16 * MIB]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn memory_on_the_host_takes_nothing_of_the_device() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let mut host = prop();
        host[2] = 3;
        cuda.make("cuMemCreate", &[64 * MIB, of(&host), 0]);
        assert_eq!(cuda.free_bytes(), start);
    });
}

#[test]
fn an_imported_handle_in_the_same_process_costs_nothing_more() {
    on(&["H100-80"], || {
        let cuda = Cuda::with_context();
        let start = cuda.free_bytes();
        let handle = create(&cuda, 64 * MIB);
        let mut fd = -1_i32;
        cuda.ok("cuMemExportToShareableHandle", &[at(&mut fd), handle, 1, 0]);
        let other = cuda.make("cuMemImportFromShareableHandle", &[u64::try_from(fd).unwrap(), 1]);
        assert_eq!(start - cuda.free_bytes(), 64 * MIB);
        cuda.ok("cuMemRelease", &[handle]);
        assert_eq!(start - cuda.free_bytes(), 64 * MIB);
        cuda.ok("cuMemRelease", &[other]);
        assert_eq!(cuda.free_bytes(), start);
        let mut out = 0_u64;
        assert_eq!(cuda.call("cuMemImportFromShareableHandle", &[at(&mut out), 0, 1]), 1, "not such a file");
    });
}

fn send_fd(stream: &UnixStream, fd: i32) {
    let mut byte = [0_u8; 1];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = [0_u64; 4];
    // SAFETY: the message points at buffers that outlive the call, the control buffer has room for one descriptor.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd);
        assert_eq!(libc::sendmsg(stream.as_raw_fd(), &raw const message, 0), 1);
    }
}

fn receive_fd(stream: &UnixStream) -> i32 {
    let mut byte = [0_u8; 1];
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = [0_u64; 4];
    // SAFETY: as for sending.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = std::mem::size_of_val(&control) as _;
        assert_eq!(libc::recvmsg(stream.as_raw_fd(), &raw mut message, 0), 1);
        libc::CMSG_DATA(libc::CMSG_FIRSTHDR(&raw const message)).cast::<i32>().read_unaligned()
    }
}

#[test]
fn exported_memory_outlives_its_exporter_and_ends_with_its_last_holder() {
    let socket = std::env::var(crate::common::ARGUMENT).unwrap_or_default();
    match role().as_deref() {
        Some("exporter") => {
            let cuda = Cuda::with_context();
            let handle = create(&cuda, 64 * MIB);
            let mut fd = -1_i32;
            cuda.ok("cuMemExportToShareableHandle", &[at(&mut fd), handle, 1, 0]);
            let stream = UnixListener::bind(&socket).unwrap().accept().unwrap().0;
            send_fd(&stream, fd);
            return serve(|_| "sent".to_owned());
        }
        Some(_) => {
            let cuda = Cuda::with_context();
            let stream = loop {
                match UnixStream::connect(&socket) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
                }
            };
            let fd = receive_fd(&stream);
            let handle = cuda.make("cuMemImportFromShareableHandle", &[u64::try_from(fd).unwrap(), 1]);
            return serve(|line| match line {
                "release" => cuda.call("cuMemRelease", &[handle]).to_string(),
                _ => cuda.free_bytes().to_string(),
            });
        }
        None => {}
    }
    let node = TestNode::of(&["H100-80"]);
    let start = |role| {
        let mut command = node.command(role);
        command.env(crate::common::ARGUMENT, node.dir().join("socket"));
        crate::common::Process::start(command)
    };
    let (mut exporter, mut importer) = (start("exporter"), start("importer"));
    exporter.ask("wait");
    let with_both = importer.number("free-bytes");
    exporter.kill();
    let context = 528 * MIB;
    while importer.number("free-bytes") == with_both {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(importer.number("free-bytes"), with_both + context, "only its context went with the exporter");
    assert_eq!(importer.ask("release"), "0");
    assert_eq!(importer.number("free-bytes"), with_both + context + 64 * MIB);
    importer.finish();
}

#[test]
fn an_allocation_of_an_exported_pool_is_charged_once_and_survives_its_pool() {
    let socket = std::env::var(crate::common::ARGUMENT).unwrap_or_default();
    let props = [1_u64 | 1 << 32, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    match role().as_deref() {
        Some("exporter") => {
            let cuda = Cuda::with_context();
            let pool = cuda.make("cuMemPoolCreate", &[of(&props)]);
            let pointer = cuda.make("cuMemAllocFromPoolAsync", &[MIB, pool, 0]);
            cuda.ok("cuMemsetD8_v2", &[pointer, 42, MIB]);
            cuda.ok("cuCtxSynchronize", &[]);
            let (mut fd, mut data) = (-1_i32, [0_u8; 64]);
            cuda.ok("cuMemPoolExportToShareableHandle", &[at(&mut fd), pool, 1, 0]);
            cuda.ok("cuMemPoolExportPointer", &[at(&mut data), pointer]);
            std::fs::write(format!("{socket}.data"), data).unwrap();
            let stream = UnixListener::bind(&socket).unwrap().accept().unwrap().0;
            send_fd(&stream, fd);
            return serve(|_| "sent".to_owned());
        }
        Some(_) => {
            let cuda = Cuda::with_context();
            let stream = loop {
                match UnixStream::connect(&socket) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
                }
            };
            let fd = u64::try_from(receive_fd(&stream)).unwrap();
            let before = cuda.free_bytes();
            let pool = cuda.make("cuMemPoolImportFromShareableHandle", &[fd, 1, 0]);
            let data = std::fs::read(format!("{socket}.data")).unwrap();
            let pointer = cuda.make("cuMemPoolImportPointer", &[pool, data.as_ptr() as u64]);
            assert_eq!(cuda.free_bytes(), before, "the exporter pays");
            assert_eq!(cuda.call("cuMemAllocFromPoolAsync", &[at(&mut 0_u64), MIB, pool, 0]), 800);
            let mut byte = [0_u8];
            cuda.ok("cuMemcpyDtoH_v2", &[byte.as_mut_ptr() as u64, pointer + MIB - 1, 1]);
            assert_eq!(byte, [42], "the same memory");
            return serve(|line| match line {
                "free" => cuda.call("cuMemFreeAsync", &[pointer, 0]).to_string(),
                _ => cuda.free_bytes().to_string(),
            });
        }
        None => {}
    }
    let node = TestNode::of(&["H100-80"]);
    let start = |role| {
        let mut command = node.command(role);
        command.env(crate::common::ARGUMENT, node.dir().join("socket"));
        crate::common::Process::start(command)
    };
    let (mut exporter, mut importer) = (start("exporter"), start("importer"));
    exporter.ask("wait");
    let with_both = importer.number("free-bytes");
    exporter.kill();
    while importer.number("free-bytes") == with_both {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // Its context went with the exporter, the segment did not.
    assert_eq!(importer.number("free-bytes"), with_both + 528 * MIB);
    assert_eq!(importer.ask("free"), "0");
    assert_eq!(importer.number("free-bytes"), with_both + (528 + 32) * MIB);
    importer.finish();
}

#[test]
fn memory_opened_by_ipc_is_charged_once_and_survives_its_owner() {
    let file = std::env::var(crate::common::ARGUMENT).unwrap_or_default();
    match role().as_deref() {
        Some("owner") => {
            let cuda = Cuda::with_context();
            let pointer = cuda.alloc(64 * MIB);
            let mut handle = [0_u8; 64];
            cuda.ok("cuIpcGetMemHandle", &[handle.as_mut_ptr() as u64, pointer]);
            return serve(|_| {
                std::fs::write(&file, handle).unwrap();
                "written".to_owned()
            });
        }
        Some(_) => {
            let cuda = Cuda::with_context();
            let mut pointer = 0_u64;
            return serve(|line| match line {
                "open" => open_ipc(&cuda, &std::fs::read(&file).unwrap(), &mut pointer).to_string(),
                "close" => cuda.call("cuIpcCloseMemHandle", &[pointer]).to_string(),
                _ => cuda.free_bytes().to_string(),
            });
        }
        None => {}
    }
    let node = TestNode::of(&["H100-80"]);
    let start = |role| {
        let mut command = node.command(role);
        command.env(crate::common::ARGUMENT, node.dir().join("handle"));
        crate::common::Process::start(command)
    };
    let (mut owner, mut other) = (start("owner"), start("other"));
    owner.ask("write");
    let before = other.number("free-bytes");
    assert_eq!(other.ask("open"), "0");
    assert_eq!(other.number("free-bytes"), before, "the owner pays");
    owner.kill();
    while other.number("free-bytes") == before {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(other.number("free-bytes"), before + 528 * MIB);
    assert_eq!(other.ask("close"), "0");
    assert_eq!(other.number("free-bytes"), before + (528 + 64) * MIB);
    other.finish();
}

/// The handle is passed by value, which takes a signature of its own.
fn open_ipc(cuda: &Cuda, handle: &[u8], pointer: &mut u64) -> i32 {
    #[repr(C)]
    struct Handle([u8; 64]);
    type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
    let handle = Handle(handle.try_into().unwrap());
    // SAFETY: the signature is the driver's.
    unsafe { std::mem::transmute::<usize, Open>(cuda.entry("cuIpcOpenMemHandle_v2"))(pointer, handle, 1) }
}
