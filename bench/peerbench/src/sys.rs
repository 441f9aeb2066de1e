//! The few Linux calls the tools need beyond std, declared by hand so that plain `rustc` (1.63) builds them.
use std::os::raw::{c_int, c_void};
use std::os::unix::io::RawFd;

#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(not(target_arch = "x86_64"), repr(C))]
#[derive(Clone, Copy)]
pub struct EpollEvent {
    pub events: u32,
    pub data: u64,
}

pub const EPOLLIN: u32 = 0x1;
pub const EPOLLOUT: u32 = 0x4;
pub const EPOLLERR: u32 = 0x8;
pub const EPOLLHUP: u32 = 0x10;
pub const EPOLLRDHUP: u32 = 0x2000;

extern "C" {
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, ev: *mut EpollEvent) -> c_int;
    fn epoll_wait(epfd: c_int, evs: *mut EpollEvent, max: c_int, timeout: c_int) -> c_int;
    fn socket(domain: c_int, ty: c_int, proto: c_int) -> c_int;
    fn connect(fd: c_int, addr: *const c_void, len: u32) -> c_int;
    fn listen(fd: c_int, backlog: c_int) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, val: *const c_void, len: u32) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, name: c_int, val: *mut c_void, len: *mut u32) -> c_int;
    fn read(fd: c_int, buf: *mut c_void, n: usize) -> isize;
    fn write(fd: c_int, buf: *const c_void, n: usize) -> isize;
    fn close(fd: c_int) -> c_int;
    fn clock_gettime(clock: c_int, t: *mut TimeSpec) -> c_int;
    fn memchr(s: *const c_void, c: c_int, n: usize) -> *const c_void;
}

pub struct Epoll(c_int);

impl Epoll {
    pub fn new() -> Epoll {
        let fd = unsafe { epoll_create1(0x80000) };
        assert!(fd >= 0, "epoll_create1 failed");
        Epoll(fd)
    }
    fn ctl(&self, op: c_int, fd: RawFd, events: u32, data: u64) {
        let mut ev = EpollEvent { events, data };
        unsafe { epoll_ctl(self.0, op, fd, &mut ev) };
    }
    pub fn add(&self, fd: RawFd, events: u32, data: u64) {
        self.ctl(1, fd, events, data)
    }
    pub fn modify(&self, fd: RawFd, events: u32, data: u64) {
        self.ctl(3, fd, events, data)
    }
    /// timeout_ms < 0 blocks. Returns the number of events filled in.
    pub fn wait(&self, evs: &mut [EpollEvent], timeout_ms: i32) -> usize {
        let n = unsafe { epoll_wait(self.0, evs.as_mut_ptr(), evs.len() as c_int, timeout_ms) };
        n.max(0) as usize
    }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// What a read or a write did.
pub enum Io {
    N(usize),
    Again,
    Err(i32),
}

fn io(n: isize) -> Io {
    if n >= 0 {
        return Io::N(n as usize);
    }
    match errno() {
        11 | 4 => Io::Again,
        e => Io::Err(e),
    }
}

pub fn sys_read(fd: RawFd, buf: &mut [u8]) -> Io {
    io(unsafe { read(fd, buf.as_mut_ptr() as *mut c_void, buf.len()) })
}
pub fn sys_write(fd: RawFd, buf: &[u8]) -> Io {
    io(unsafe { write(fd, buf.as_ptr() as *const c_void, buf.len()) })
}
pub fn sys_close(fd: RawFd) {
    unsafe { close(fd) };
}
/// Listen again with a longer queue than std asks for.
pub fn set_backlog(fd: RawFd, n: i32) {
    unsafe { listen(fd, n) };
}
pub fn set_nodelay(fd: RawFd) {
    let one: c_int = 1;
    unsafe { setsockopt(fd, 6, 1, &one as *const c_int as *const c_void, 4) };
}
/// Pending error of a socket after a nonblocking connect (0 = connected).
pub fn so_error(fd: RawFd) -> i32 {
    let mut e: c_int = 0;
    let mut l: u32 = 4;
    unsafe { getsockopt(fd, 1, 4, &mut e as *mut c_int as *mut c_void, &mut l) };
    e
}

#[repr(C)]
struct SockAddrIn {
    family: u16,
    port: u16,
    addr: u32,
    zero: [u8; 8],
}

/// Nonblocking connect to an IPv4 address; the result arrives as EPOLLOUT.
pub fn connect_nb(ip: [u8; 4], port: u16) -> Result<RawFd, i32> {
    let fd = unsafe { socket(2, 1 | 0x800 | 0x80000, 0) };
    if fd < 0 {
        return Err(errno());
    }
    set_nodelay(fd);
    let sa = SockAddrIn { family: 2, port: port.to_be(), addr: u32::from_ne_bytes(ip), zero: [0; 8] };
    let r = unsafe { connect(fd, &sa as *const SockAddrIn as *const c_void, 16) };
    if r < 0 {
        let e = errno();
        if e != 115 {
            sys_close(fd);
            return Err(e);
        }
    }
    Ok(fd)
}

/// Where `b` first stands in `hay`.
pub fn find_byte(hay: &[u8], b: u8) -> Option<usize> {
    if hay.is_empty() {
        return None;
    }
    let p = unsafe { memchr(hay.as_ptr() as *const c_void, b as c_int, hay.len()) };
    if p.is_null() {
        None
    } else {
        Some(p as usize - hay.as_ptr() as usize)
    }
}

/// Offset just past the blank line that ends an HTTP head, if it is there.
pub fn head_end(b: &[u8]) -> Option<usize> {
    let mut i = 0;
    while let Some(p) = find_byte(&b[i..], b'\n') {
        let nl = i + p;
        if b[nl + 1..].starts_with(b"\r\n") {
            return Some(nl + 3);
        }
        if b[nl + 1..].starts_with(b"\n") {
            return Some(nl + 2);
        }
        i = nl + 1;
    }
    None
}

const CLOCK_MONOTONIC: c_int = 1;

#[repr(C)]
struct TimeSpec {
    sec: i64,
    nsec: i64,
}

/// Microseconds of the monotonic clock.
pub fn now_us() -> u64 {
    let mut t = TimeSpec { sec: 0, nsec: 0 };
    unsafe { clock_gettime(CLOCK_MONOTONIC, &mut t) };
    t.sec as u64 * 1_000_000 + t.nsec as u64 / 1000
}
