// Opens a page in headless Chromium and runs a script in it: dev/test/plans.sh, or by hand
//
//   node dev/test/chromium.js PAGE WIDTHxHEIGHT [--shot FILE] [SCRIPT...]
//
// PAGE is a path, with #... an address in it. The scripts run one after another as bodies of async
// functions, and the strings that they return are printed. Keys are pressed by awaiting
// press('Tab'). --shot writes a picture of the whole page at the end. It talks to Chromium through
// a pipe, so it needs no package of node's.
'use strict';
const { spawn } = require('child_process');
const fs = require('fs'), os = require('os'), path = require('path');

const [page, size, ...rest] = process.argv.slice(2);
const shot = rest[0] === '--shot' ? rest.splice(0, 2)[1] : null;
const [width, height] = size.split('x').map(Number);
const profile = fs.mkdtempSync(path.join(os.tmpdir(), 'chromium-'));
const browser = spawn('chromium', ['--headless', '--no-sandbox', '--disable-gpu',
  '--hide-scrollbars', '--remote-debugging-pipe', `--user-data-dir=${profile}`, 'about:blank'],
{ stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
const waiting = new Map(), urls = [];  // calls without an answer so far; what the page requested
let sent = 0, held = '', session, loaded, fail;
const failed = new Promise((_, reject) => { fail = reject; });
failed.catch(() => {});

function send(method, params = {}) {
  browser.stdio[3].write(JSON.stringify({ id: ++sent, method, params, sessionId: session }) + '\0');
  return Promise.race([failed, new Promise(done => waiting.set(sent, done))]);
}

// Presses a key: a character, Tab or an arrow.
async function press(key) {
  const code = { Tab: 9, ArrowDown: 40, ArrowUp: 38, ArrowLeft: 37, ArrowRight: 39 }[key];
  const text = code ? undefined : key;
  const params = { key, text, windowsVirtualKeyCode: code || key.toUpperCase().charCodeAt(0) };
  await send('Input.dispatchKeyEvent', { type: 'keyDown', ...params });
  await send('Input.dispatchKeyEvent', { type: 'keyUp', ...params });
}

browser.stdio[4].on('data', data => {
  const messages = (held + data).split('\0');
  held = messages.pop();
  for (const message of messages.map(text => JSON.parse(text))) {
    if (waiting.has(message.id)) {
      waiting.get(message.id)(message.result || message);
    } else if (message.method === 'Page.loadEventFired') {
      loaded();
    } else if (message.method === 'Runtime.bindingCalled') {
      const { id, key } = JSON.parse(message.params.payload);
      press(key).then(() => send('Runtime.evaluate', { expression: `pressed[${id}]()` }));
    } else if (message.method === 'Runtime.exceptionThrown') {
      const { text, exception } = message.params.exceptionDetails;
      fail(new Error(`${text} ${exception && exception.description}`));
    } else if (message.method === 'Network.requestWillBeSent') {
      urls.push(message.params.request.url);
    } else if (message.method === 'Log.entryAdded') {
      process.stderr.write(`page: ${message.params.entry.text}\n`);
    }
  }
});

const helpers = `window.pressed = {};
window.press = key => new Promise(done => {
  const id = Object.keys(pressed).length;
  pressed[id] = done;
  pressKey(JSON.stringify({ id, key }));
});`;

async function main() {
  const { targetInfos } = await send('Target.getTargets');
  const { targetId } = targetInfos.find(target => target.type === 'page');
  session = (await send('Target.attachToTarget', { targetId, flatten: true })).sessionId;
  for (const domain of ['Page', 'Runtime', 'Log', 'Network']) {
    await send(domain + '.enable');
  }
  await send('Runtime.addBinding', { name: 'pressKey' });
  await send('Emulation.setDeviceMetricsOverride',
    { width, height, deviceScaleFactor: 1, mobile: false });
  const ready = new Promise(done => { loaded = done; });
  const [file, hash] = page.split('#');
  await send('Page.navigate', { url: `file://${path.resolve(file)}${hash ? '#' + hash : ''}` });
  await ready;
  await send('Runtime.evaluate', { expression: helpers });
  for (const script of rest) {
    const { result, exceptionDetails } = await send('Runtime.evaluate', {
      expression: `(async () => { ${script} })()`, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) {
      throw new Error(exceptionDetails.exception.description);
    }
    process.stdout.write(result.value === undefined ? '' : String(result.value));
  }
  const loads = urls.filter(url => !/^(file|blob|data|about):/.test(url));
  if (loads.length) {
    throw new Error('the page loads ' + loads);
  }
  if (shot) {
    const { cssContentSize } = await send('Page.getLayoutMetrics');
    const clip = { x: 0, y: 0, width, height: cssContentSize.height, scale: 1 };
    const { data } = await send('Page.captureScreenshot', { clip, captureBeyondViewport: true });
    fs.writeFileSync(shot, Buffer.from(data, 'base64'));
  }
}

main().then(() => 0, error => {
  process.stderr.write(`chromium.js: ${error.message}\n`);
  return 1;
}).then(status => {
  process.exitCode = status;
  browser.on('exit', () => fs.rmSync(profile, { recursive: true, force: true }));
  send('Browser.close').catch(() => browser.kill());
});
