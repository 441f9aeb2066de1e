//! The load generator: closed loop, open loop (fixed rate), aborting clients, and multi-turn chat sessions.
//! One thread, one epoll loop. Prints one JSON object on stdout.

use crate::json::{esc, parse};
use crate::sys::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::os::unix::io::RawFd;

#[derive(Clone)]
pub struct Options {
    pub targets: Vec<([u8; 4], u16)>,
    pub path: String,
    pub model: String,
    pub headers: Vec<String>,
    pub stream: bool,
    pub conc: usize,
    pub requests: u64,    // 0 = no limit
    pub duration_us: u64, // stop issuing after this; 0 = no limit
    pub max_us: u64,      // stop altogether
    pub rate: f64,        // > 0: open loop, requests/s
    pub tokens: u32,
    pub prompt_bytes: usize,
    pub ramp_us: u64,
    pub abort_events: u32, // close after so many events
    pub abort_us: u64,     // close so long after sending
    pub sessions: usize,
    pub turns: usize,
    pub groups: usize,
    pub system_bytes: usize,
    pub user_bytes: usize,
    pub sticky: bool, // sessions: pick the target by session (several targets only)
    pub seed: u64,
    pub usage: bool,
    pub show: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            targets: vec![],
            path: "/v1/chat/completions".into(),
            model: "sim".into(),
            headers: vec![],
            stream: false,
            conc: 1,
            requests: 0,
            duration_us: 0,
            max_us: 60_000_000,
            rate: 0.0,
            tokens: 32,
            prompt_bytes: 400,
            ramp_us: 0,
            abort_events: 0,
            abort_us: 0,
            sessions: 0,
            turns: 6,
            groups: 10,
            system_bytes: 2048,
            user_bytes: 600,
            sticky: false,
            seed: 1,
            usage: false,
            show: false,
        }
    }
}

#[derive(PartialEq, Clone, Copy, Debug)]
/// Where a connection is in its life.
enum Stage {
    Closed,
    Connecting,
    Idle,
    Busy,
}

#[derive(PartialEq, Clone, Copy)]
/// What the next bytes of a response are.
enum Body {
    Head,
    Len(usize),
    ChunkSize,
    Chunk(usize),
    Trailer,
    Eof,
}

struct Conn {
    fd: RawFd,
    gen: u32,
    st: Stage,
    target: usize,
    out: Vec<u8>,
    outpos: usize,
    inb: Vec<u8>,
    body: Body,
    status: u16,
    close: bool,
    sse: bool,
    fresh: bool, // no response seen yet on this connection
    // this request
    active: bool,
    t_sched: u64,
    t_first: u64,
    events: u32,
    done: bool,
    line: Vec<u8>,
    plain: Vec<u8>,
    text: String,
    cached: u64,
    prompt: u64,
    sess: usize,
}

struct Session {
    turn: usize,
    messages: String, // JSON array without its closing bracket
    busy: bool,
    last_target: usize,
}

struct Rng(u64);
impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) as usize) % n
    }
    fn words(&mut self, n: usize) -> String {
        let mut s = String::with_capacity(n + 8);
        while s.len() < n {
            for _ in 0..2 + self.below(7) {
                s.push((b'a' + self.below(26) as u8) as char);
            }
            s.push(' ');
        }
        s.truncate(n);
        s
    }
}

#[derive(Default)]
struct Tally {
    ok: u64,
    issued: u64,
    events: u64,
    ttft: Vec<u32>,
    lat: Vec<u32>,
    ttft_by_turn: BTreeMap<usize, Vec<u32>>,
    errors: BTreeMap<String, u64>,
    aborted: u64,
    cached: u64,
    prompt: u64,
    connects: u64,
    peak: usize,
    last_abort: u64,
}

pub struct Load {
    options: Options,
    epoll: Epoll,
    conns: Vec<Conn>,
    tally: Tally,
    timers: BinaryHeap<Reverse<(u64, u8, u32, u32)>>, // at, kind, conn, gen
    t0: u64,
    next_target: usize,
    rng: Rng,
    body: Vec<u8>,
    body_patch: usize,
    req_head: Vec<String>, // per target, without content-length and blank line
    uniq: u64,
    inflight: usize,
    sess: Vec<Session>,
    sess_left: Vec<usize>, // sessions that are idle and have turns left
    arrivals: u64,
    idle: Vec<usize>,
    read_buffer: Vec<u8>,
}

const T_START: u8 = 0;
const T_ABORT: u8 = 1;
const T_ARRIVE: u8 = 2;

/// The value (ms) below which the share `p` of `v` (us) lies; -1 for none.
fn pct(v: &mut [u32], p: f64) -> f64 {
    if v.is_empty() {
        return -1.0;
    }
    v.sort_unstable();
    let i = ((v.len() as f64 * p).ceil() as usize).clamp(1, v.len()) - 1;
    v[i] as f64 / 1000.0
}

impl Load {
    pub fn new(o: Options) -> Load {
        let mut rng = Rng(o.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let text = rng.words(o.prompt_bytes.max(16));
        let uniq_mark = "0000000000000000";
        let so = if o.stream && o.usage { ",\"stream_options\":{\"include_usage\":true}" } else { "" };
        let head = if o.path.ends_with("/chat/completions") {
            format!("{{\"model\":{},\"messages\":[{{\"role\":\"user\",\"content\":\"", esc(&o.model))
        } else {
            format!("{{\"model\":{},\"prompt\":\"", esc(&o.model))
        };
        let tail = if o.path.ends_with("/chat/completions") { "\"}]" } else { "\"" };
        let body = format!(
            "{head}{uniq_mark} {text}{tail},\"max_tokens\":{},\"temperature\":0.7,\"stream\":{}{so}}}",
            o.tokens, o.stream
        );
        let req_head = o
            .targets
            .iter()
            .map(|(ip, port)| {
                let mut h = format!(
                    "POST {} HTTP/1.1\r\nhost: {}.{}.{}.{}:{port}\r\ncontent-type: application/json\r\naccept: */*\r\nuser-agent: peers-load\r\n",
                    o.path, ip[0], ip[1], ip[2], ip[3]
                );
                for x in &o.headers {
                    h.push_str(x);
                    h.push_str("\r\n");
                }
                h
            })
            .collect();
        let systems: Vec<String> = (0..o.groups.max(1)).map(|_| rng.words(o.system_bytes)).collect();
        let sess: Vec<Session> = (0..o.sessions)
            .map(|i| Session {
                turn: 0,
                messages: format!(
                    "[{{\"role\":\"system\",\"content\":{}}}",
                    esc(&systems[i % systems.len()])
                ),
                busy: false,
                last_target: 0,
            })
            .collect();
        Load {
            epoll: Epoll::new(),
            conns: Vec::new(),
            tally: Tally::default(),
            timers: BinaryHeap::new(),
            t0: now_us(),
            next_target: 0,
            rng,
            body_patch: head.len(),
            body: body.into_bytes(),
            req_head,
            uniq: o.seed << 40,
            inflight: 0,
            sess_left: (0..sess.len()).collect(),
            sess,
            arrivals: 0,
            idle: Vec::new(),
            read_buffer: vec![0; 1 << 18],
            options: o,
        }
    }

    fn new_conn(&mut self) -> usize {
        let target = self.next_target % self.options.targets.len();
        self.next_target += 1;
        self.conns.push(Conn {
            fd: -1,
            gen: 0,
            st: Stage::Closed,
            target,
            out: Vec::new(),
            outpos: 0,
            inb: Vec::new(),
            body: Body::Head,
            status: 0,
            close: false,
            sse: false,
            fresh: true,
            active: false,
            t_sched: 0,
            t_first: 0,
            events: 0,
            done: false,
            line: Vec::new(),
            plain: Vec::new(),
            text: String::new(),
            cached: 0,
            prompt: 0,
            sess: usize::MAX,
        });
        self.conns.len() - 1
    }

    fn err(&mut self, what: &str) {
        *self.tally.errors.entry(what.to_string()).or_insert(0) += 1;
    }

    fn may_issue(&self, now: u64) -> bool {
        if self.options.requests > 0 && self.tally.issued >= self.options.requests {
            return false;
        }
        if self.options.duration_us > 0 && now >= self.t0 + self.options.duration_us {
            return false;
        }
        self.options.sessions == 0 || !self.sess_left.is_empty()
    }

    pub fn run(&mut self) {
        self.t0 = now_us();
        if self.options.rate > 0.0 {
            self.timers.push(Reverse((self.t0, T_ARRIVE, 0, 0)));
        } else {
            for i in 0..self.options.conc {
                let id = self.new_conn();
                let at = self.t0 + self.options.ramp_us * i as u64 / self.options.conc as u64;
                self.timers.push(Reverse((at, T_START, id as u32, 0)));
            }
        }
        let end = self.t0 + self.options.max_us;
        let mut evs = vec![EpollEvent { events: 0, data: 0 }; 1024];
        let mut timed_out = false;
        loop {
            let now = now_us();
            while let Some(&Reverse((t, kind, id, gen))) = self.timers.peek() {
                if t > now {
                    break;
                }
                self.timers.pop();
                match kind {
                    T_START => {
                        if !self.conns[id as usize].active {
                            self.issue(id as usize, now)
                        }
                    }
                    T_ABORT => {
                        let c = &self.conns[id as usize];
                        if c.gen == gen && c.active {
                            self.abort(id as usize, now);
                        }
                    }
                    _ => self.arrive(t, now),
                }
            }
            if self.inflight == 0 && self.timers.is_empty() {
                break;
            }
            if now >= end {
                timed_out = true;
                break;
            }
            let timeout = match self.timers.peek() {
                Some(Reverse((t, ..))) => t.saturating_sub(now).min(end - now),
                None => end - now,
            };
            let n = self.epoll.wait(&mut evs, ((timeout + 999) / 1000) as i32);
            for e in &evs[..n] {
                let (events, data) = (e.events, e.data);
                self.on_io(data as u32 as usize, (data >> 32) as u32, events);
            }
        }
        let secs = (now_us() - self.t0) as f64 / 1e6;
        let unfinished = self.inflight;
        let a = &mut self.tally;
        let errs: u64 = a.errors.values().sum();
        let emap: Vec<String> = a.errors.iter().map(|(k, v)| format!("{}:{v}", esc(k))).collect();
        let mean = |v: &Vec<u32>| {
            if v.is_empty() {
                -1.0
            } else {
                v.iter().map(|&x| x as f64).sum::<f64>() / v.len() as f64 / 1000.0
            }
        };
        let (tm, lm) = (mean(&a.ttft), mean(&a.lat));
        let turns: Vec<String> = a
            .ttft_by_turn
            .iter_mut()
            .map(|(k, v)| format!("\"{k}\":[{:.2},{:.2}]", pct(v, 0.5), pct(v, 0.99)))
            .collect();
        println!(
            "{{\"secs\":{secs:.3},\"issued\":{},\"ok\":{},\"errors\":{errs},\"error_kinds\":{{{}}},\"unfinished\":{unfinished},\"timed_out\":{timed_out},\"aborted\":{},\"since_last_abort_ms\":{:.1},\"rps\":{:.2},\"events\":{},\"eps\":{:.1},\"connects\":{},\"peak_inflight\":{},\"ttft_ms\":{{\"mean\":{tm:.3},\"p50\":{:.3},\"p90\":{:.3},\"p99\":{:.3},\"max\":{:.3}}},\"lat_ms\":{{\"mean\":{lm:.3},\"p50\":{:.3},\"p90\":{:.3},\"p99\":{:.3},\"max\":{:.3}}},\"prompt_tokens\":{},\"cached_tokens\":{},\"ttft_by_turn\":{{{}}}}}",
            a.issued, a.ok, emap.join(","), a.aborted,
            if a.last_abort > 0 { (now_us() - a.last_abort) as f64 / 1000.0 } else { -1.0 },
            a.ok as f64 / secs, a.events, a.events as f64 / secs, a.connects, a.peak,
            pct(&mut a.ttft, 0.5), pct(&mut a.ttft, 0.9), pct(&mut a.ttft, 0.99), pct(&mut a.ttft, 1.0),
            pct(&mut a.lat, 0.5), pct(&mut a.lat, 0.9), pct(&mut a.lat, 0.99), pct(&mut a.lat, 1.0),
            a.prompt, a.cached, turns.join(",")
        );
    }

    fn arrive(&mut self, t: u64, now: u64) {
        if !self.may_issue(now) {
            return;
        }
        self.arrivals += 1;
        let next = self.t0 + (self.arrivals as f64 * 1e6 / self.options.rate) as u64;
        self.timers.push(Reverse((next, T_ARRIVE, 0, 0)));
        let id = match self.idle.pop() {
            Some(id) => id,
            None if self.conns.len() < 8192 => self.new_conn(),
            None => {
                self.tally.issued += 1;
                return self.err("no free connection");
            }
        };
        self.issue(id, t);
    }

    /// Start a request on connection `id`; its latency counts from `t`.
    fn issue(&mut self, id: usize, t: u64) {
        if !self.may_issue(now_us()) {
            return;
        }
        self.tally.issued += 1;
        self.inflight += 1;
        self.tally.peak = self.tally.peak.max(self.inflight);
        let mut extra = String::new();
        let mut sid = usize::MAX;
        let mut made: Option<Vec<u8>> = None;
        if self.options.sessions > 0 {
            let k = self.rng.below(self.sess_left.len());
            sid = self.sess_left.swap_remove(k);
            let user = self.rng.words(self.options.user_bytes);
            let s = &mut self.sess[sid];
            s.busy = true;
            s.messages.push_str(&format!(",{{\"role\":\"user\",\"content\":{}}}", esc(&user)));
            extra = format!("x-session-id: sess-{sid:05}\r\nx-user-id: sess-{sid:05}\r\n");
            made = Some(
                format!(
                    "{{\"model\":{},\"messages\":{}],\"max_tokens\":{},\"temperature\":0.7,\"stream\":true,\"stream_options\":{{\"include_usage\":true}},\"user\":\"sess-{sid:05}\"}}",
                    esc(&self.options.model), s.messages, self.options.tokens
                )
                .into_bytes(),
            );
            if self.options.targets.len() > 1 {
                // direct to the engines: sticky by session, or round robin
                let want = if self.options.sticky {
                    sid % self.options.targets.len()
                } else {
                    self.tally.issued as usize % self.options.targets.len()
                };
                s.last_target = want;
                if self.conns[id].target != want {
                    self.close(id);
                    self.conns[id].target = want;
                }
            }
        }
        self.uniq += 1;
        let body: &[u8] = match &made {
            Some(b) => b,
            None => {
                // a prompt of its own from the first byte on
                let u = self.uniq.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let h = format!("{u:016x}");
                let p = self.body_patch;
                self.body[p..p + 16].copy_from_slice(h.as_bytes());
                &self.body
            }
        };
        let c = &mut self.conns[id];
        c.active = true;
        c.t_sched = t;
        c.t_first = 0;
        c.events = 0;
        c.done = false;
        c.status = 0;
        c.sse = false;
        c.body = Body::Head;
        c.inb.clear();
        c.line.clear();
        c.plain.clear();
        c.text.clear();
        c.cached = 0;
        c.prompt = 0;
        c.sess = sid;
        c.out.clear();
        c.outpos = 0;
        c.out.extend_from_slice(self.req_head[c.target].as_bytes());
        c.out.extend_from_slice(extra.as_bytes());
        c.out.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
        c.out.extend_from_slice(body);
        if self.options.abort_us > 0 {
            // gen moves on if the connection has to be made first
            let gen = if c.st == Stage::Closed { c.gen + 1 } else { c.gen };
            self.timers.push(Reverse((t + self.options.abort_us, T_ABORT, id as u32, gen)));
        }
        if c.st == Stage::Closed {
            self.connect(id);
        } else {
            c.st = Stage::Busy;
            self.push_out(id);
        }
    }

    fn connect(&mut self, id: usize) {
        let (ip, port) = self.options.targets[self.conns[id].target];
        self.tally.connects += 1;
        let c = &mut self.conns[id];
        c.gen += 1;
        match connect_nb(ip, port) {
            Ok(fd) => {
                c.fd = fd;
                c.st = Stage::Connecting;
                c.fresh = true;
                self.epoll.add(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, id as u64 | (c.gen as u64) << 32);
            }
            Err(e) => self.fail(id, &format!("connect errno {e}")),
        }
    }

    fn close(&mut self, id: usize) {
        let c = &mut self.conns[id];
        if c.st != Stage::Closed {
            sys_close(c.fd);
            c.st = Stage::Closed;
            c.gen += 1;
        }
    }

    fn push_out(&mut self, id: usize) {
        let c = &mut self.conns[id];
        while c.outpos < c.out.len() {
            match sys_write(c.fd, &c.out[c.outpos..]) {
                Io::N(n) => c.outpos += n,
                Io::Again => {
                    let d = id as u64 | (c.gen as u64) << 32;
                    self.epoll.modify(c.fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP, d);
                    return;
                }
                Io::Err(_) => return self.broken(id, "write failed"),
            }
        }
    }

    /// The connection ended. An idle keep-alive connection that the server closed as we sent
    /// on it is retried once on a new one (as real clients do); all else is an error.
    fn broken(&mut self, id: usize, why: &str) {
        let c = &mut self.conns[id];
        let retry = c.active && !c.fresh && c.status == 0 && c.inb.is_empty() && c.body == Body::Head;
        self.close(id);
        if retry {
            self.conns[id].outpos = 0;
            self.connect(id);
        } else if self.conns[id].active {
            self.fail(id, why);
        }
    }

    fn fail(&mut self, id: usize, why: &str) {
        self.err(why);
        self.close(id);
        self.ended(id, false);
    }

    fn abort(&mut self, id: usize, now: u64) {
        self.close(id);
        self.tally.aborted += 1;
        self.tally.last_abort = now;
        self.ended(id, false);
    }

    fn ended(&mut self, id: usize, ok: bool) {
        let now = now_us();
        self.inflight -= 1;
        self.conns[id].active = false;
        let sid = self.conns[id].sess;
        if sid != usize::MAX {
            let text = std::mem::take(&mut self.conns[id].text);
            let s = &mut self.sess[sid];
            s.busy = false;
            s.turn += 1;
            s.messages.push_str(&format!(",{{\"role\":\"assistant\",\"content\":{}}}", esc(&text)));
            if s.turn < self.options.turns {
                self.sess_left.push(sid);
            }
        }
        if self.options.rate > 0.0 {
            self.idle.push(id);
        } else if ok {
            self.issue(id, now);
        } else if self.options.abort_events == 0 && self.options.abort_us == 0 {
            // an error: wait a little before the next try
            self.timers.push(Reverse((now + 20_000, T_START, id as u32, 0)));
        }
        // sessions: slots that found nothing to do wake up when a session comes free
        if self.options.sessions > 0 && !self.sess_left.is_empty() {
            if let Some(k) =
                self.conns.iter().position(|c| !c.active && c.target < self.options.targets.len())
            {
                if k != id || ok {
                    self.issue(k, now);
                }
            }
        }
    }

    fn complete(&mut self, id: usize) {
        let now = now_us();
        let c = &mut self.conns[id];
        c.fresh = false;
        let (status, events, done, sse) = (c.status, c.events, c.done, c.sse);
        let lat = (now - c.t_sched) as u32;
        let ttft = if c.t_first > 0 { (c.t_first - c.t_sched) as u32 } else { lat };
        let mut why = String::new();
        if status != 200 {
            why = format!("http {status}");
            if self.options.show {
                eprintln!("{status}: {}", String::from_utf8_lossy(&c.plain[..c.plain.len().min(400)]));
            }
        } else if self.options.stream || c.sess != usize::MAX {
            if !sse {
                why = "not an event stream".into();
            } else if !done {
                why = "no [DONE]".into();
            } else if events < self.options.tokens {
                why = "too few events".into();
            }
        } else {
            let want = self.options.tokens as usize * 4;
            let (mut n, mut p, mut k) = (0, 0, 0);
            if let Some(j) = parse(&c.plain) {
                if let Some(ch) = j.get("choices").and_then(|x| x.arr().first()) {
                    let t = ch.get("message").and_then(|m| m.get("content")).or(ch.get("text"));
                    n = t.and_then(|t| t.str()).map(|s| s.len()).unwrap_or(0);
                }
                if let Some(u) = j.get("usage") {
                    p = u.get("prompt_tokens").and_then(|x| x.num()).unwrap_or(0.0) as u64;
                    k = u
                        .get("prompt_tokens_details")
                        .and_then(|d| d.get("cached_tokens"))
                        .and_then(|x| x.num())
                        .unwrap_or(0.0) as u64;
                }
            }
            c.prompt = p;
            c.cached = k;
            if n != want {
                why = "wrong content".into();
            }
        }
        let (close, p, k) = (c.close, c.prompt, c.cached);
        let turn = if c.sess != usize::MAX { Some(self.sess[c.sess].turn) } else { None };
        if close {
            self.close(id);
        } else {
            self.conns[id].st = Stage::Idle;
        }
        self.tally.events += events as u64;
        self.tally.prompt += p;
        self.tally.cached += k;
        if why.is_empty() {
            self.tally.ok += 1;
            self.tally.lat.push(lat);
            self.tally.ttft.push(ttft);
            if let Some(t) = turn {
                self.tally.ttft_by_turn.entry(t + 1).or_default().push(ttft);
            }
            self.ended(id, true);
        } else {
            self.err(&why);
            self.ended(id, false);
        }
    }

    fn on_io(&mut self, id: usize, gen: u32, events: u32) {
        if self.conns[id].gen != gen || self.conns[id].st == Stage::Closed {
            return;
        }
        if self.conns[id].st == Stage::Connecting {
            let e = so_error(self.conns[id].fd);
            if e != 0 {
                return self.fail(id, &format!("connect errno {e}"));
            }
            if events & EPOLLOUT == 0 {
                return;
            }
            let c = &mut self.conns[id];
            c.st = Stage::Busy;
            self.epoll.modify(c.fd, EPOLLIN | EPOLLRDHUP, id as u64 | (gen as u64) << 32);
            self.push_out(id);
        } else if events & EPOLLOUT != 0 {
            self.epoll.modify(self.conns[id].fd, EPOLLIN | EPOLLRDHUP, id as u64 | (gen as u64) << 32);
            self.push_out(id);
        }
        if self.conns[id].gen != gen || events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP | EPOLLERR) == 0 {
            return;
        }
        let fd = self.conns[id].fd;
        let mut rd = std::mem::take(&mut self.read_buffer);
        let r = sys_read(fd, &mut rd);
        match r {
            Io::Again => {}
            Io::N(0) => {
                if self.conns[id].active && self.conns[id].body == Body::Eof {
                    self.conns[id].close = true;
                    self.complete(id);
                } else {
                    self.broken(id, "connection closed early");
                }
            }
            Io::Err(e) => self.broken(id, &format!("read errno {e}")),
            Io::N(n) => {
                if self.conns[id].active {
                    self.feed(id, &rd[..n]);
                }
            }
        }
        self.read_buffer = rd;
    }

    fn feed(&mut self, id: usize, data: &[u8]) {
        let now = now_us();
        let limit = self.options.abort_events;
        let want_text = self.conns[id].sess != usize::MAX || self.options.usage;
        let c = &mut self.conns[id];
        let mut d: &[u8] = data;
        let held: Vec<u8>;
        if !c.inb.is_empty() {
            let mut h = std::mem::take(&mut c.inb);
            h.extend_from_slice(d);
            held = h;
            d = &held;
        }
        let mut finished = false;
        loop {
            match c.body {
                Body::Head => {
                    let he = match head_end(d) {
                        Some(he) => he,
                        None => {
                            c.inb.extend_from_slice(d);
                            break;
                        }
                    };
                    let head = String::from_utf8_lossy(&d[..he]).into_owned();
                    d = &d[he..];
                    c.status = head.get(9..12).and_then(|s| s.parse().ok()).unwrap_or(0);
                    if c.status == 100 {
                        continue;
                    }
                    c.close = head.starts_with("HTTP/1.0");
                    c.body = Body::Eof;
                    for l in head.lines().skip(1) {
                        if let Some((k, v)) = l.split_once(':') {
                            let v = v.trim();
                            if k.eq_ignore_ascii_case("content-length") {
                                c.body = Body::Len(v.parse().unwrap_or(0));
                            } else if k.eq_ignore_ascii_case("transfer-encoding") {
                                c.body = Body::ChunkSize;
                            } else if k.eq_ignore_ascii_case("content-type") {
                                c.sse = v.starts_with("text/event-stream");
                            } else if k.eq_ignore_ascii_case("connection") {
                                c.close = v.eq_ignore_ascii_case("close");
                            }
                        }
                    }
                    if c.body == Body::Len(0) {
                        finished = true;
                        break;
                    }
                }
                Body::Len(n) => {
                    let k = n.min(d.len());
                    take(c, &d[..k], now, want_text);
                    c.body = Body::Len(n - k);
                    if n == k {
                        finished = true;
                    }
                    break;
                }
                Body::Eof => {
                    take(c, d, now, want_text);
                    break;
                }
                Body::ChunkSize => {
                    let p = match find_byte(d, b'\n') {
                        Some(p) => p,
                        None => {
                            c.inb.extend_from_slice(d);
                            break;
                        }
                    };
                    let mut n = 0usize;
                    for &b in &d[..p] {
                        match (b as char).to_digit(16) {
                            Some(x) => n = n * 16 + x as usize,
                            None => break,
                        }
                    }
                    d = &d[p + 1..];
                    c.body = if n == 0 { Body::Trailer } else { Body::Chunk(n + 2) };
                }
                Body::Chunk(n) => {
                    if d.is_empty() {
                        break;
                    }
                    let k = n.min(d.len());
                    // the last two bytes of a chunk are its CRLF
                    let payload = k.min(n.saturating_sub(2));
                    take(c, &d[..payload], now, want_text);
                    d = &d[k..];
                    c.body = if n == k { Body::ChunkSize } else { Body::Chunk(n - k) };
                }
                Body::Trailer => {
                    let p = match find_byte(d, b'\n') {
                        Some(p) => p,
                        None => {
                            c.inb.extend_from_slice(d);
                            break;
                        }
                    };
                    let empty = p == 0 || (p == 1 && d[0] == b'\r');
                    d = &d[p + 1..];
                    if empty {
                        finished = true;
                        break;
                    }
                }
            }
        }
        if limit > 0 && c.events >= limit {
            return self.abort(id, now);
        }
        if finished {
            self.complete(id);
        }
    }
}

/// Body bytes of a response arrived.
fn take(c: &mut Conn, mut d: &[u8], now: u64, want_text: bool) {
    if !c.sse {
        if c.plain.len() < 1 << 20 {
            c.plain.extend_from_slice(d);
        }
        return;
    }
    while let Some(p) = find_byte(d, b'\n') {
        if c.line.is_empty() {
            on_line(c, &d[..p], now, want_text);
        } else {
            let mut l = std::mem::take(&mut c.line);
            l.extend_from_slice(&d[..p]);
            on_line(c, &l, now, want_text);
            l.clear();
            c.line = l;
        }
        d = &d[p + 1..];
    }
    c.line.extend_from_slice(d);
}

/// A whole line of an event stream.
fn on_line(c: &mut Conn, l: &[u8], now: u64, want_text: bool) {
    let v = match l.strip_prefix(b"data:") {
        Some(v) => v,
        None => return,
    };
    let v = v.strip_prefix(b" ").unwrap_or(v);
    if v.starts_with(b"[DONE]") {
        c.done = true;
        return;
    }
    if c.t_first == 0 {
        c.t_first = now;
    }
    c.events += 1;
    if want_text {
        let v = v.strip_suffix(b"\r").unwrap_or(v);
        if let Some(j) = parse(v) {
            if let Some(ch) = j.get("choices").and_then(|x| x.arr().first()) {
                let t = ch.get("delta").and_then(|m| m.get("content")).or(ch.get("text"));
                if let Some(s) = t.and_then(|t| t.str()) {
                    c.text.push_str(s);
                }
            }
            if let Some(u) = j.get("usage") {
                let n = |x: Option<&crate::json::Json>| x.and_then(|x| x.num()).unwrap_or(0.0) as u64;
                let p = n(u.get("prompt_tokens"));
                if p > 0 {
                    c.prompt = p;
                    c.cached = n(u.get("prompt_tokens_details").and_then(|d| d.get("cached_tokens")));
                }
            }
        }
    }
}
